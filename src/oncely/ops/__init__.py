"""What operators ask and do, as functions over a ledger: the only door of the command
line and the dashboard.
"""

from oncely.core.state_words import IN_DOUBT, RESETTABLE, STATES
from oncely.ops.activity import (
    FoundActivity,
    Point,
    Rates,
    SeenWorker,
    activity,
    audit,
    check_kept,
    keeps_activity,
    runs,
    workers,
)
from oncely.ops.decisions import Changed, forget, happened, not_happened, reset
from oncely.ops.doubts import doubts
from oncely.ops.found import Found, first
from oncely.ops.known import EXACT
from oncely.ops.letter_groups import (
    FoundGroups,
    LetterGroup,
    letter_group,
    letter_groups,
    letters_to_export,
)
from oncely.ops.letters import (
    LettersChanged,
    dead_letters,
    discard_letters,
    letter,
    letter_as_dict,
    letters_numbered,
    retry_letters,
)
from oncely.ops.overview import LATE_S, LedgerOverview, Snag, overview
from oncely.ops.probing import Probed, probe
from oncely.ops.records import Details, Selection, details, find, record_as_dict, select, word_for
from oncely.ops.search import Searched, search
from oncely.ops.sending import (
    MOST_UNSENT,
    Unsent,
    discard_unsent,
    queued,
    refused_numbered,
    send_again,
    send_every_again,
    unsent,
    unsent_as_dict,
    unsent_messages,
)
from oncely.ops.status import Backlogs, Status, Summary, backlogs, status
from oncely.ops.story import Chapter, Story, story
from oncely.ops.upkeep import LEASE, RETENTION, policy_retentions, problems, purge, retentions
from oncely.ops.waiting import cancel, run_now, waiting, waiting_as_dict, waiting_key
