"""What can be asked at a command line?

``plan`` says what a training will need before it starts, ``doctor`` what a machine can do, ``verify`` and ``twins``
whether the numbers are right, and the checkpoint commands what a checkpoint holds.
"""
