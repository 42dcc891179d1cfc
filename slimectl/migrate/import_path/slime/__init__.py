"""The package that `import slime` finds in plain Python if no slime is installed. It installs the stand-ins."""

from slimectl.migrate.stand_ins import install_stand_ins

install_stand_ins()
