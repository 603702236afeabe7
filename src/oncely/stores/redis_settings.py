"""Which settings of a Redis are safe for a ledger, as INFO shows them."""

from collections.abc import Mapping, Sequence

_POLICY = "noeviction"


READS = (
    "info time scan exists hget hgetall hmget memory|usage smembers zcard zcount zrange zrank"
    " zscore"
)
"""The commands of every program, besides EVAL and EVALSHA."""
WRITES = "del hdel hincrby hset sadd srem zadd zrem"
"""Those of every program but a reader."""


def refusal(info: Mapping[str, str]) -> str | None:
    """Why this Redis cannot hold a ledger, and what to type; None where it can."""
    mode, policy = info.get("redis_mode", "standalone"), info.get("maxmemory_policy", _POLICY)
    if mode != "standalone":
        return f"it runs in mode {mode}, which is not supported; name a single server"
    if policy != _POLICY:
        return (
            f"it evicts records when memory is full (maxmemory-policy {policy}); type "
            f'"CONFIG SET maxmemory-policy {_POLICY}" in redis-cli, and '
            f'"maxmemory-policy {_POLICY}" in redis.conf'
        )
    return None


def has_aof(info: Mapping[str, str]) -> bool:
    """Whether the server keeps a log of all writes (AOF)."""
    return info.get("aof_enabled") == "1"


def problems(info: Mapping[str, str], appendfsync: str | None) -> Sequence[str]:
    """What is wrong, a sentence each. `appendfsync` is None where the server does not show it."""
    refused = refusal(info)
    found = [] if refused is None else [f"This Redis cannot hold a ledger: {refused}."]
    if not has_aof(info):
        found.append(
            "Redis keeps no log (appendonly no): a restart loses all since the last snapshot, and "
            'messages completed since then run again; type "CONFIG SET appendonly yes" in '
            'redis-cli, and "appendonly yes" in redis.conf.'
        )
    elif appendfsync != "always":
        found.append(
            f"Redis does not flush each write to the disk (appendfsync {appendfsync or 'unknown'}"
            "): a power cut loses the writes of the last second or two, and messages completed "
            'then run again; type "CONFIG SET appendfsync always" in redis-cli, and '
            '"appendfsync always" in redis.conf.'
        )
    replicas = int(info.get("connected_slaves", "0"))
    if replicas:
        found.append(
            f"Redis writes to its replicas ({replicas}) after it has answered: a failover loses "
            "the newest claims and completions, and their messages run again."
        )
    return found
