"""Stand-ins for slime's own modules, by subject. `user_code/stand_ins.py` lists the names that they implement."""
