"""Windows: which pixel values of an image of more than 8 bits become black and white."""

Window = tuple[float, float]


def ordered_window(window: Window | None) -> Window | None:
    """Returns the window; raises `ValueError` if its ends are not in order."""
    if window is not None and window[0] >= window[1]:
        raise ValueError("the first number must be below the second")
    return window
