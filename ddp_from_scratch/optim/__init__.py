"""SGD, Adam and AdamW on flat parameters, which the ranks of a machine may share."""
