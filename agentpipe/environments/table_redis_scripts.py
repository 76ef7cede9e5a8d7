"""What the server does for :mod:`agentpipe.environments.table_redis`, in Lua.

Each script is one round trip, and nothing comes between its commands. KEYS: pointer, versions, then a version's key.
"""

from __future__ import annotations

_SOUND = """
local function named(version)
  return version and #version == 64 and not string.find(version, '[^0-9a-f]')
end
local function numbered(number)
  return number and #number <= 15 and string.find(number, '^[1-9][0-9]*$')
end
"""
# What is no pointer, no list of versions or no version any more is written anew: the publisher has the truth.
PUBLISH = (
    _SOUND
    + """
for index, kind in ipairs({'hash', 'zset', 'string'}) do
  local found = redis.call('TYPE', KEYS[index]).ok
  if found ~= 'none' and found ~= kind then redis.call('DEL', KEYS[index]) end
end
local listed = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for index = 1, #listed, 2 do
  if not (named(listed[index]) and numbered(listed[index + 1])) then redis.call('ZREM', KEYS[2], listed[index]) end
end
if redis.call('GET', KEYS[3]) ~= ARGV[3] then redis.call('SET', KEYS[3], ARGV[3]) end
redis.call('ZADD', KEYS[2], 'GT', ARGV[2], ARGV[1])
local pointer = redis.call('HMGET', KEYS[1], 'version', 'number')
local sound = named(pointer[1]) and numbered(pointer[2])
local moved = 0
if not sound or tonumber(ARGV[2]) > tonumber(pointer[2]) then
  redis.call('HSET', KEYS[1], 'version', ARGV[1], 'number', ARGV[2])
  pointer, moved = {ARGV[1], ARGV[2]}, 1
end
return {moved, pointer[1], pointer[2]}
"""
)
"""ARGV: version, number, its bytes → whether the pointer moved, and the version and number where it points now."""
CURRENT = (
    _SOUND
    + """
local version = redis.call('HGET', KEYS[1], 'version')
if not version then return {} end
if not named(version) then return {version} end
local key = ARGV[1] .. version
local kind = redis.call('TYPE', key).ok
return {version, kind, kind == 'string' and redis.call('GET', key)}
"""
)
"""ARGV: beginning of versions' keys → nothing, or the pointer's version, the type of its key, and its bytes."""
VERSIONS = """
return {redis.call('HGET', KEYS[1], 'version') or '', redis.call('ZREVRANGE', KEYS[2], 0, -1, 'WITHSCORES')}
"""
PRUNE = """
local kept = {[redis.call('HGET', KEYS[1], 'version') or ''] = true}
for index = 3, #ARGV do kept[ARGV[index]] = true end
local removed = {}
for rank, version in ipairs(redis.call('ZREVRANGE', KEYS[2], 0, -1)) do
  if rank > tonumber(ARGV[1]) and not kept[version] then
    redis.call('DEL', ARGV[2] .. version)
    redis.call('ZREM', KEYS[2], version)
    removed[#removed + 1] = version
  end
end
return removed
"""
"""ARGV: how many are kept, beginning of versions' keys, pinned versions → those that were removed."""
