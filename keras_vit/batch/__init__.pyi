from ._embed import embed as embed
from ._search import Match as Match
from ._search import search as search
from .folder import EmbedResult as EmbedResult
