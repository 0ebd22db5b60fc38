"""What stands where a tensor was?

Parts, which show a whole tensor and hold a slice of it: of a state, of a gradient, of a param at stage 3. They answer
what a slice can answer and refuse the rest by name.
"""
