"""Hold-out evaluation, statistics, failure attribution, drift, gates and the plots that go with them."""
