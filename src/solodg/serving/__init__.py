"""A trained model behind HTTP: `solodg serve RUN`. Needs the extra `serve`."""
