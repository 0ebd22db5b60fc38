"""What can a script ask of an optimizer beside a step?

Each function is a method of the optimizer, and takes its engine: the gradients, whole params, a move of states to
another tier, surgery, reports.
"""
