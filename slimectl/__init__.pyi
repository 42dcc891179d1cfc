from slimectl.api.models import Sampler as Sampler
from slimectl.api.models import Trainer as Trainer
from slimectl.api.models import convert as convert
from slimectl.api.models import create_model as create_model
from slimectl.api.stages import evaluate as evaluate
from slimectl.api.stages import load_settings as load_settings
from slimectl.api.stages import prompts as prompts
from slimectl.api.stages import rollout as rollout
from slimectl.api.stages import run as run
from slimectl.api.stages import score as score
from slimectl.api.stages import train as train
from slimectl.errors import SlimectlError as SlimectlError
from slimectl.settings import Settings as Settings
from slimectl.types import Prompt as Prompt
from slimectl.types import Sample as Sample
from slimectl.types import StepReport as StepReport

__version__: str
