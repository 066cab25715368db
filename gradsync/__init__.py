from gradsync._errors import GradSyncError
from gradsync.functional import *
