"""Stand-ins for slime's own modules, by subject; `user_code/stand_ins.py` says which names of slime they implement."""
