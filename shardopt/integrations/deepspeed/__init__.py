"""How does a DeepSpeed config become an optimizer?

``keys.py`` reads the config as it is written; ``sections.py`` says what each section becomes here, ``ignored.py``
what has no effect, ``scheduler.py`` the curves of learning rates.
"""
