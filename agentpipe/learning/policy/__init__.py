"""What plays: the network, its compiled forward pass, observation statistics, and the package of all of them."""
