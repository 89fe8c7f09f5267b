"""`python -m minipaged.tutorial`: the tutorials of the folder `tutorials/`, stepped through in a terminal."""
