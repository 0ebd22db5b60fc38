"""How does one rank read what another holds, while that one is elsewhere?

Each rank serves its slices from a thread of its own, over sockets that prove a secret of the group. ``peers.py``
connects to the servers of others, ``serve.py`` answers, and ``epoch.py`` numbers the moments that an answer must be of.
What is read (states, gradients, whole params) is the domain's to say.
"""
