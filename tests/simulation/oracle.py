"""The oracle: judges a history, of which it knows only plain data, by what must always hold.

It imports nothing of what is simulated. The rules that it knows are those that
docs/explanation/guarantees.md promises, told a second time and another way round: as what may be
seen from outside.

    U1  fences of a record strictly grow, and never start again while it exists
    U2  no write with an old fence changes state
    U3  a delivery is acknowledged only after a durable end, or deliberately by policy
    U4  nothing is published without a committed effect; what is committed is published in the end
    U5  an accepted message is in exactly one of pending, processing, completed, dead
    U6  when faults stop, everything settles
"""

from tests.simulation.delivery_judge import DeliveryJudge, EndJudge, SendJudge
from tests.simulation.history import History
from tests.simulation.judging import Promises
from tests.simulation.row_judge import RowJudge
from tests.simulation.run_judge import HolderJudge, RunJudge
from tests.simulation.waiting_judge import WaitingJudge

_JUDGES = (RowJudge, HolderJudge, RunJudge, WaitingJudge, DeliveryJudge, SendJudge, EndJudge)


def judge(history: History, promises: Promises) -> list[str]:
    """What is wrong with a history, a sentence each; nothing where all holds."""
    return [wrong for each in _JUDGES for wrong in each(history, promises).wrongs()]
