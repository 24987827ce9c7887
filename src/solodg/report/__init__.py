"""A trained run as one HTML page."""
