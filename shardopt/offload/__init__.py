"""Where do states rest between steps? In memory beside the params, or in a file on disk."""
