"""Ways into dzero from the loops of other libraries."""
