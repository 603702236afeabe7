/*
 * One message of one consumer, all that can become of it, with a few faults of any kinds, in any
 * order, at any step. MODE chooses the delivery guarantee; -DBUG_... breaks one rule, and is caught.
 *
 * `check.py` runs all of them. README.md says what is left out, and which rule each property is.
 * The words, and what each command finds in each state, are those of the table in core/rules.py.
 */

#define AT_MOST_ONCE      0   /* what failed is skipped, what is in doubt never runs again unasked */
#define AT_LEAST_ONCE     1   /* the effect is outside of the ledger's database */
#define EFFECTIVELY_ONCE  2   /* effect, deferred messages and completion are one transaction */

#ifndef MODE
#define MODE EFFECTIVELY_ONCE
#endif

/* ---- Bounds ---------------------------------------------------------------------------------- */

#ifndef FAULTS
#define FAULTS 4    /* of all kinds together */
#endif
#ifndef WORKERS
#define WORKERS 2   /* and a relay */
#endif
#define TRIES 2

/* ---- The ledger ------------------------------------------------------------------------------ */

mtype:state = { absent, processing, handled, completed, failed, exhausted };
mtype:outcome = { granted, may_send, duplicate, busy, in_doubt, dead };
mtype:doubt = { retry, hold, dead_letter, probe };

mtype:state state = absent;
bool leased;                    /* somebody is promised to be left alone; only when processing */
byte fence;
byte birth;
byte attempts;
bool waiting[2];                /* deferred messages that are stored and not sent */
mtype:doubt on_in_doubt;

byte claim_fence[WORKERS];      /* of the claim in a worker's memory */
byte claim_birth[WORKERS];

#define IS_HELD      (state == processing && leased)
#define IS_IN_DOUBT  (state == processing && !leased)
#define NONE_WAITS   (!waiting[0] && !waiting[1])
#define SKIPS_FAILED (MODE == AT_MOST_ONCE)

/* ---- The broker ------------------------------------------------------------------------------ */

byte queued = 1;                /* copies of the message */
byte delayed;                   /* copies that come later */
bool set_aside;                 /* a copy is among the dead letters */
bool delivered[WORKERS];        /* a delivery that this worker has not acknowledged */

bool at_work[WORKERS];          /* has a delivery in memory */
bool unasked[WORKERS];          /* and has not asked for a claim yet */

byte faults = FAULTS;           /* that may still come */
#define FAULT     faults > 0 -> faults--
#define OR_CRASH  :: atomic { FAULT; goto crashed }

/* ---- What is noted by one who watches and knows no rule --------------------------------------- */

#define NOBODY WORKERS

byte holder = NOBODY;           /* got the newest grant, and has not used it up */
byte highest;                   /* fence granted since the record exists */
byte runs;                      /* of the handler: granted, and not given back */
byte effects;                   /* at least once: whether there is one */
byte allowed = 1;               /* effects; an operator who forgets a record allows one more */
bool deferring;                 /* a handler has succeeded and had something to send */
byte applied[2];                /* how often the receiver acted on what was deferred */
bool was_completed;
bool was_purged;

#define IS_SETTLED  (state == completed || set_aside || (SKIPS_FAILED && state == failed))

/* ---- Claims ---------------------------------------------------------------------------------- */

#if defined(BUG_NO_FENCE_CHECK)
#define IS_NEWEST(w)  (state != absent)
#elif defined(BUG_NO_BIRTH_CHECK)
#define IS_NEWEST(w)  (state != absent && fence == claim_fence[w])
#else
#define IS_NEWEST(w)  (state != absent && fence == claim_fence[w] && birth == claim_birth[w])
#endif

#if WORKERS > 2
#define IS_REMEMBERED(b)  (b == birth || b == claim_birth[0] || b == claim_birth[1] || b == claim_birth[2])
#else
#define IS_REMEMBERED(b)  (b == birth || b == claim_birth[0] || b == claim_birth[1])
#endif

hidden byte drawn;

/* Random in truth. Here the first that nobody remembers: births are only compared, so that stands
 * for every other that is new. */
inline draw_birth() {
    drawn = 1;
    do
    :: IS_REMEMBERED(drawn) -> drawn++
    :: else -> break
    od;
    birth = drawn
}

inline take_claim(w) {
#ifdef BUG_SENDING_KEEPS_FENCE
    fence = fence + (state != handled);
#else
    fence++;
#endif
#ifdef BUG_GRANT_KEEPS_BIRTH
    birth = 1;
#else
    draw_birth();
#endif
    claim_fence[w] = fence;
    claim_birth[w] = birth;
    assert(fence > highest);
    highest = fence;
    holder = w
}

inline grant(w) {
    assert(!leased && state != handled && state != completed);
    former = state;
    former_attempts = attempts;
    take_claim(w);
#ifndef BUG_ATTEMPTS_COUNTED_ON_FAILURE
    attempts++;
#endif
    state = processing;
    leased = true;
    runs++;
    assert(runs <= TRIES);
    outcome = granted
}

inline exhaust() {
    state = exhausted;
    leased = false;
    holder = NOBODY
}

inline grant_or_exhaust(w) {
    if
    :: attempts >= TRIES -> exhaust(); outcome = dead
    :: else -> grant(w)
    fi
}

inline remove_record() {
    state = absent;
    leased = false;
    fence = 0;
    birth = 0;
    attempts = 0;
    waiting[0] = false;
    waiting[1] = false;
    holder = NOBODY;
    highest = 0;
    runs = 0
}

/* ---- What is asked --------------------------------------------------------------------------- */

#ifdef BUG_LIVE_LEASE_IGNORED
#define IS_BUSY  false
#else
#define IS_BUSY  IS_HELD
#endif

#ifdef BUG_RETRY_UNDER_HOLD
#define HOLDS  false
#else
#define HOLDS  (on_in_doubt == hold)
#endif

#ifdef BUG_FAILED_IS_DUPLICATE
#define IS_SKIPPED  (state == failed)
#else
#define IS_SKIPPED  (SKIPS_FAILED && state == failed)
#endif

hidden mtype:outcome outcome;

inline ask(w) {
    unasked[w] = false;
    if
    :: IS_BUSY -> outcome = busy
    :: state == completed || IS_SKIPPED -> outcome = duplicate
    :: state == exhausted -> outcome = dead
#ifdef BUG_HANDLED_RUNS_AGAIN
    :: state == handled -> grant(w)
#else
    :: state == handled -> take_claim(w); outcome = may_send
#endif
    :: IS_IN_DOUBT && HOLDS -> outcome = in_doubt
    :: IS_IN_DOUBT && on_in_doubt == dead_letter -> exhaust(); outcome = dead
    :: IS_IN_DOUBT && on_in_doubt == probe -> outcome = in_doubt    /* found: unknown */
    :: IS_IN_DOUBT && on_in_doubt == probe && effects > 0 -> complete(); outcome = duplicate
    :: IS_IN_DOUBT && on_in_doubt == probe && effects == 0 -> grant_or_exhaust(w)
    :: else -> grant_or_exhaust(w)
    fi
}

inline happen() {
#if MODE == AT_LEAST_ONCE
    effects = 1
#else
    effects++;
    assert(effects <= allowed)
#endif
}

inline complete() {
    assert(NONE_WAITS && effects > 0);
    state = completed;
    leased = false;
    holder = NOBODY;
    was_completed = true
}

/* Of a handler that has succeeded: handled where it deferred something, completed where not. */
inline succeed(w) {
#ifdef BUG_SENT_IN_HANDLER
    send(0);
#endif
#ifdef BUG_EFFECT_WITHOUT_CLAIM
    happen();
#endif
    if
    :: state == processing && IS_NEWEST(w) ->
        assert(holder == w);
#if MODE == EFFECTIVELY_ONCE && !defined(BUG_SPLIT_TRANSACTION) && !defined(BUG_EFFECT_WITHOUT_CLAIM)
        happen();
#endif
        if
        :: complete()
        :: assert(effects > 0 && !deferring);
            state = handled;
            leased = false;
            waiting[0] = true;
            waiting[1] = true;
            deferring = true
        fi
    :: else
    fi
}

/* With the last try spent, or an error that no further try can mend, it is final. */
inline fail(w) {
    if
    :: state == processing && IS_NEWEST(w) ->
        assert(holder == w);
#ifdef BUG_ATTEMPTS_COUNTED_ON_FAILURE
        attempts++;
#endif
        if
        :: exhaust()
        :: attempts < TRIES -> state = failed; leased = false; holder = NOBODY
        fi
    :: else
    fi
}

inline release(w) {
    if
    :: state == processing && IS_NEWEST(w) ->
        assert(holder == w);
        if
        :: former == absent -> remove_record()
        :: else ->
            state = former;
            attempts = former_attempts;
            leased = false;
            holder = NOBODY;
            runs--;
#ifdef BUG_RELEASE_RESTORES_FENCE
            fence--;
#endif
#ifndef BUG_RELEASE_KEEPS_BIRTH
            draw_birth()
#endif
        fi
    :: else
    fi
}

/* A heartbeat that comes late. */
inline extend(w) {
    if
    :: IS_IN_DOUBT && IS_NEWEST(w) ->
        assert(holder == w);
        leased = true
    :: else
    fi
}

/* ---- Deferred messages ----------------------------------------------------------------------- */

inline first_waiting(d) {
    if
    :: waiting[0] -> d = 0
    :: !waiting[0] && waiting[1] -> d = 1
    fi
}

inline send(d) {
    assert(deferring);
#ifdef BUG_RECEIVER_DOES_NOT_DEDUPLICATE
    applied[d]++;
#else
    applied[d] = 1;
#endif
    assert(applied[d] <= 1)
}

/* ---- Who acts -------------------------------------------------------------------------------- */

/* Idle workers are alike: the first of them receives, which spares the same again with the others. */
#define IS_FIRST_IDLE(w)  (!at_work[w] && (w == 0 || at_work[0]) && (w <= 1 || at_work[1]))

/* What is put back comes once nobody is at work on the message. If it came at once, two who send
 * what was deferred could fence each other for ever. */
#define IS_LATER  (!IS_HELD && !(state == handled && holder != NOBODY))
#define COMES     (queued > 0 || (delayed > 0 && IS_LATER))

/* What is of no more use is forgotten at once: states that differ only in that are one. */
inline forget_former() {
    former = absent;
    former_attempts = 0
}

inline forget_claim(w) {
    claim_fence[w] = 0;
    claim_birth[w] = 0;
    forget_former();
    if
    :: holder == w -> holder = NOBODY
    :: else
    fi
}

inline forget_delivery(w) {
    forget_claim(w);
    at_work[w] = false;
    unasked[w] = false;
    d = 0
}

/* A record may have been settled when its worker looked, and then forgotten by an operator. */
inline acknowledge(w) {
    if
    :: delivered[w] ->
        delivered[w] = false;
        assert(IS_SETTLED || allowed > 1)
    :: else
    fi
}

proctype Worker(byte me) {
    mtype:state former = absent;
    byte former_attempts, d;

receive:
end:
    atomic {
        COMES && IS_FIRST_IDLE(me) ->
        if
        :: queued > 0 -> queued--
        :: delayed > 0 && IS_LATER -> delayed--
        fi;
        delivered[me] = true;
        at_work[me] = true;
        unasked[me] = true
    };
#ifdef BUG_ACKNOWLEDGED_EARLY
    acknowledge(me);
#endif

    if
    :: atomic {
        ask(me);
        if
        :: outcome == granted
#if MODE == EFFECTIVELY_ONCE
        /* The inbox: claim and work are one transaction. */
        :: outcome == granted -> succeed(me); goto answered
#endif
        :: outcome == may_send -> goto sending
        :: outcome == duplicate -> goto settled
#ifdef BUG_BUSY_ACKNOWLEDGED
        :: outcome == busy -> goto settled
#else
        :: outcome == busy -> goto put_back
#endif
        :: outcome == dead || outcome == in_doubt -> goto to_set_aside
        fi
    }
#if MODE == EFFECTIVELY_ONCE
    /* The inbox's handler raises: all of it is rolled back. */
    :: atomic { FAULT; goto put_back }
#endif
    OR_CRASH
    fi;

#if MODE != EFFECTIVELY_ONCE || defined(BUG_SPLIT_TRANSACTION)
    if
    :: atomic {
#if MODE == EFFECTIVELY_ONCE
        IS_NEWEST(me) ->
#endif
        happen()
    }
#if MODE == EFFECTIVELY_ONCE
    :: atomic { !IS_NEWEST(me) -> goto fenced }
#endif
    :: atomic { FAULT; goto to_fail }
    :: atomic { FAULT; goto to_release }
    OR_CRASH
    fi;
#endif

to_succeed:
    if
    :: atomic {
        succeed(me);
answered:
        if
        :: true
        :: FAULT; goto to_succeed   /* the answer is lost: the same is asked again */
        fi;
        if
        :: state == handled && IS_NEWEST(me) -> forget_former(); goto sending
        :: state == completed && IS_NEWEST(me) -> forget_claim(me); goto settled
        :: else -> forget_claim(me); goto fenced
        fi
    }
    :: atomic { FAULT; extend(me); goto to_succeed }
    :: atomic { FAULT; goto to_fail }
#if MODE == EFFECTIVELY_ONCE
    :: atomic { FAULT; goto to_release }
#endif
    OR_CRASH
    fi;

sending:
    if
    :: atomic {
        !NONE_WAITS ->
        first_waiting(d);
#ifdef BUG_MARKED_BEFORE_SENT
        waiting[d] = false
#else
        send(d)
#endif
    }
    :: atomic { NONE_WAITS -> goto to_complete }
#ifdef BUG_COMPLETED_BEFORE_SENT
    :: goto to_complete
#endif
    OR_CRASH
    fi;
    if
    :: atomic {
#ifdef BUG_MARKED_BEFORE_SENT
        send(d);
#else
        waiting[d] = false;
#endif
        d = 0;
        goto sending
    }
    OR_CRASH
    fi;

to_complete:
    if
    :: atomic {
        if
        :: state == handled && IS_NEWEST(me) ->
            assert(holder == me);
            complete()
        :: else
        fi;
        if
        :: true
        :: FAULT; goto to_complete
        fi;
        if
        :: state == completed && IS_NEWEST(me) -> forget_claim(me); goto settled
        :: else -> forget_claim(me); goto fenced
        fi
    }
    OR_CRASH
    fi;

to_fail:
    if
    :: atomic {
        fail(me);
        if
        :: true
        :: FAULT; goto to_fail
        fi;
        forget_claim(me);
        if
        :: state == exhausted -> goto to_set_aside
        :: else -> goto put_back
        fi
    }
    OR_CRASH
    fi;

to_release:
    if
    :: atomic {
        release(me);
        if
        :: forget_claim(me); goto put_back
        :: FAULT; goto to_release
        fi
    }
    OR_CRASH
    fi;

to_set_aside:
    if
    :: atomic {
        if
        :: delivered[me] -> set_aside = true
        :: else
        fi;
        acknowledge(me);    /* one step of the broker's */
        forget_delivery(me);
        goto receive
    }
    OR_CRASH
    fi;

fenced:
#ifdef BUG_LOSER_ACKNOWLEDGES
    goto settled;
#endif
put_back:
    if
    :: atomic {
        if
#ifdef BUG_PUT_BACK_AT_ONCE
        :: delivered[me] -> delivered[me] = false; queued++
#else
        :: delivered[me] -> delivered[me] = false; delayed++
#endif
        :: else
        fi;
        forget_delivery(me);
        goto receive
    }
    OR_CRASH
    fi;

settled:
    if
    :: atomic { acknowledge(me); forget_delivery(me); goto receive }
    OR_CRASH
    fi;

crashed:
    atomic {
        if
        :: delivered[me] -> delivered[me] = false; queued++
        :: else
        fi;
        forget_delivery(me);
#ifdef BUG_START_WIPES_CLAIMS
        if
        :: IS_HELD && holder != NOBODY -> remove_record(); leased = true
        :: else
        fi;
#endif
        goto receive
    }
}

active proctype Relay() {
    byte d;

again:
end:
    if
    :: atomic {
        !NONE_WAITS ->
        first_waiting(d);
#ifdef BUG_MARKED_BEFORE_SENT
        waiting[d] = false
#else
        send(d)
#endif
    }
#ifdef BUG_RELAY_FINISHES_EARLY
    :: atomic { state == handled && !waiting[0] -> complete(); goto again }
#else
    :: atomic { state == handled && NONE_WAITS -> complete(); goto again }
#endif
    fi;
    atomic {
        if
        :: true ->
#ifdef BUG_MARKED_BEFORE_SENT
            send(d)
#else
            waiting[d] = false
#endif
        :: FAULT    /* it crashes, and another takes over */
        fi;
        d = 0;
        goto again
    }
}

#if WORKERS > 2
#define NOBODY_HAS(what)  (!what[0] && !what[1] && !what[2])
#else
#define NOBODY_HAS(what)  (!what[0] && !what[1])
#endif

#if defined(BUG_RETENTION_SHORTER_THAN_QUEUE)
#define IS_OLD  (NOBODY_HAS(delivered) && NOBODY_HAS(unasked))
#elif defined(BUG_RETENTION_SHORTER_THAN_STALL)
#define IS_OLD  (queued == 0 && delayed == 0 && NOBODY_HAS(delivered))
#else
#define IS_OLD  (queued == 0 && delayed == 0 && NOBODY_HAS(delivered) && NOBODY_HAS(unasked))
#endif

inline take_away(w) {
    delivered[w] = false;
    queued++
}

/* Nothing else can happen. */
inline check_end() {
    assert(queued == 0 && delayed == 0);
    assert(state != handled && NONE_WAITS);
    assert(was_completed || set_aside || (SKIPS_FAILED && (state == failed || was_purged)));
    assert(!was_completed || effects > 0);
    assert(!deferring || (was_completed && applied[0] == 1 && applied[1] == 1))
}

init {
    atomic {
        if
#if MODE != AT_MOST_ONCE
        :: on_in_doubt = retry
        :: on_in_doubt = probe
#endif
        :: on_in_doubt = hold
        :: on_in_doubt = dead_letter
        fi;
        run Worker(0);
        run Worker(1);
#if WORKERS > 2
        run Worker(2);
#endif
    }

    do
    :: atomic { leased -> leased = false }

    /* The broker takes a worker for gone. */
    :: atomic { delivered[0] && faults > 0 -> faults--; take_away(0) }
    :: atomic { delivered[1] && faults > 0 -> faults--; take_away(1) }
#if WORKERS > 2
    :: atomic { delivered[2] && faults > 0 -> faults--; take_away(2) }
#endif

    /* The producer sends again, while it may. */
    :: atomic { !was_purged && faults > 0 -> faults--; queued++ }

    /* An operator resets or forgets what is set aside, and sends it again. */
    :: atomic {
        set_aside && faults > 0 && (IS_IN_DOUBT || state == failed || state == exhausted) ->
        faults--;
        set_aside = false;
        queued++;
        if
        :: state = failed; attempts = 0; runs = 0; leased = false; holder = NOBODY
        :: allowed++; remove_record()
        fi
    }

    /* Purge. */
    :: atomic {
        (state == completed || state == failed || state == exhausted) && IS_OLD ->
        assert(IS_SETTLED);
        was_purged = true;
        remove_record()
    }
#ifdef BUG_HANDLED_IS_PURGED
    :: atomic { state == handled -> remove_record() }
#endif

    :: atomic { timeout -> check_end(); break }
    od
}
