"""Extensions of hpcrl, one of each kind; docs/extending.md explains them."""
