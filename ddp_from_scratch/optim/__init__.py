"""SGD on flat parameters, and SGD whose state the ranks of a machine share."""
