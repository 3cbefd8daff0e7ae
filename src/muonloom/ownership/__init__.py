"""Which rank does the work of which matrices: pure functions of costs."""

from muonloom.ownership.assign import Atoms, matrix_cost, owners, scalar_cost, shared_out
from muonloom.ownership.ledger import Ledger
from muonloom.ownership.shares import Candidate, Copies, Share, SharedAtom

__all__ = [
    "Atoms",
    "Candidate",
    "Copies",
    "Ledger",
    "Share",
    "SharedAtom",
    "matrix_cost",
    "owners",
    "scalar_cost",
    "shared_out",
]
