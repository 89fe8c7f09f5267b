"""The step view: `python -m minipaged.watch --list` names its scenes."""
