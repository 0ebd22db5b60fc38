"""How do other libraries' files become checkpoints?

One reader for each kind of file; ``recognise.py`` says which one a directory needs. What is read is checked, never
unpickled beyond tensors and plain values.
"""
