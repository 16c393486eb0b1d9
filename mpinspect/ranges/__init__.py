""" "Which powers of two do my gradients use, what breaks, which loss scale?": capture, store, analysis and report."""
