"""Talk to the model: `python -m minipaged.chat` (__main__: the program, session: an answer, commands: /words)."""
