"""Stand-ins for slime's own modules, by subject. `plugins/stand_ins.py` lists the names that they implement."""
