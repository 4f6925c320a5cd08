"""What this machine can do, found out and not assumed: the command ``megatrain doctor``."""
