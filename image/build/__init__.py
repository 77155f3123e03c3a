"""Build the image from locked inputs. `python -m image.build` is the tool; the Makefile names its commands."""
