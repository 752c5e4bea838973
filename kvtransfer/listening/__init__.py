"""Sockets that listen for other processes of the fleet, and their authentication."""
