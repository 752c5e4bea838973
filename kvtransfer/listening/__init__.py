"""Sockets that listen for the fleet's own processes: who is let in, and what strangers may cost."""
