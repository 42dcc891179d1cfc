"""The package that `import slime` finds in plain Python where no slime is installed: it installs the stand-ins."""

from slimectl.user_code.stand_ins import install_stand_ins

install_stand_ins()
