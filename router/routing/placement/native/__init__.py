"""The block table in C++: compiled at the first start, optional, and equal to the plain one."""
