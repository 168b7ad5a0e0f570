"""`python -m services.explorer --config F`."""

from services import launch
from services.explorer.gateway import run

launch.main(run)
