"""Page maps over time: recorded as an engine steps, drawn as a page or a picture."""
