"""What does a script find in place of a tensor?

A part, which has the shape of a whole tensor and holds this rank's slice of it: of a state, of a gradient, or of a
param at stage 3. A part answers the functions that a slice can answer. It refuses all others by name.
"""
