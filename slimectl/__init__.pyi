from slimectl.errors import SlimectlError as SlimectlError
from slimectl.runtime.model_functions import Sampler as Sampler
from slimectl.runtime.model_functions import Trainer as Trainer
from slimectl.runtime.model_functions import convert as convert
from slimectl.runtime.model_functions import create_model as create_model
from slimectl.runtime.stage_functions import evaluate as evaluate
from slimectl.runtime.stage_functions import load_settings as load_settings
from slimectl.runtime.stage_functions import prompts as prompts
from slimectl.runtime.stage_functions import rollout as rollout
from slimectl.runtime.stage_functions import run as run
from slimectl.runtime.stage_functions import score as score
from slimectl.runtime.stage_functions import train as train
from slimectl.settings import Settings as Settings
from slimectl.types import Prompt as Prompt
from slimectl.types import Sample as Sample
from slimectl.types import StepReport as StepReport

__version__: str
