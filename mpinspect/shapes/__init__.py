""" "Do my shapes suit Tensor Cores?": records of matrix products, how they are recorded, judged and reported."""
