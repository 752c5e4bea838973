"""Block table and pricing in C++: compiled at the first start, optional, equal to Python."""
