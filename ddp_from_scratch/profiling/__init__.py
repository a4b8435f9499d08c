"""Timelines: a record of training steps, drawn as text, a picture, a page and a trace."""
