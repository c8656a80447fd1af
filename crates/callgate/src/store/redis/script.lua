-- Decides a call under all of its limits in one step: all are charged, or none. Or several equal calls, one after
-- the other.
--
-- Times are in microseconds, by this server's clock, which is read once. A time is two numbers (a, b),
-- and exactly a + b/p with whole a and 0 <= b < p, where p is the limit's: p tokens come in a whole
-- number of microseconds. A bucket is its theoretical arrival time (GCRA): full at `now` or before,
-- empty at now + burst. A call adds its price, and is admitted up to now + burst.
--
-- Numbers are whole and below 2^53, where doubles are exact, and so are their sums: p, and times until
-- the year 2112, are at most 2^52, and the client sees to it that bursts and prices are below 2^51. The
-- one thing that is rounded is a level that is carried from another limit: against the caller.
--
-- KEYS: for each limit its bucket and its pause.
--   A bucket holds 'limit:a:b' and expires when it is full: none is a full one. 'limit' is what it was
--   written under, 'version:p:whole:part:burst': a token takes the time (whole, part), and the burst
--   is in tokens.
--   A pause holds 'version:end'. Until then nobody draws, and then the limit's buckets are empty.
-- ARGV: 'take', 'peek', 'pause' or 'prove'; and then
--   take, peek: how many such calls there are (peek: 1), and for each limit 'limit', p, the time of its burst, and
--   a call's price, which is a time too.
--   pause: how long, and how long its end is to be remembered.
-- Answers:
--   take, peek: how many of the calls all limits admit. And for each limit: in how many microseconds it
--   admits the next of them, 0 where none is left; the time in which its bucket is full (once charged, for take);
--   and how many microseconds its pause goes on.
--   pause, prove: 'OK'.
--   An error that begins with CALLGATE is about the key that it names, or about the clock.
--
-- A refused call writes nothing, but for a bucket that was carried, or that is beyond empty because the
-- clock was set back: that one is kept as it was read. A peek never writes.

local VERSION = '1'
local MOST = 2 ^ 52
-- Makes up for more roundings of doubles than there are, each by up to 2^-53 of a number.
local UP = 1 + 2 ^ -49

local now
local problem

local function read(key)
    local value = redis.pcall('GET', key)
    if type(value) == 'table' then
        problem = key .. ' cannot be read: ' .. value.err
        return false
    end
    return value
end

-- Keeps a value until that time, and the rest of its millisecond.
local function write(key, value, till)
    redis.call('SET', key, value, 'PXAT', string.format('%.0f', math.floor(till / 1000) + 1))
end

-- When a pause ends; 0 for none.
local function read_pause(key)
    local value = read(key)
    if not value then
        return 0
    end
    local till = tonumber(string.match(value, '^' .. VERSION .. ':(%d+)$'))
    if not till or till > MOST then
        problem = key .. ' holds no pause of version ' .. VERSION
        return 0
    end
    return till
end

-- What a bucket holds, or nothing if that is none.
local function parse(value)
    local limit, p, whole, part, burst, a, b =
        string.match(value, '^(' .. VERSION .. ':(%d+):(%d+):(%d+):(%d+)):(%d+):(%d+)$')
    p, whole, part, burst = tonumber(p), tonumber(whole), tonumber(part), tonumber(burst)
    a, b = tonumber(a), tonumber(b)
    local is_limit = limit and p <= MOST and whole <= MOST and part < p and whole + part > 0 and burst <= MOST
    if not is_limit or a > 2 * MOST or b >= p then
        return nil
    end
    return { limit = limit, p = p, token = whole + part / p, burst = burst, a = a, b = b }
end

-- The time at which a bucket of another limit holds the tokens that `old` does, as far as they fit.
local function carry(old, limit)
    local new = parse(limit .. ':0:0')
    local missing = ((old.a - now) + old.b / old.p) / old.token * UP
    -- A larger burst is missing from the start.
    missing = math.max(missing + new.burst - old.burst, 0)
    local time = missing * new.token * UP
    local a = math.floor(time)
    local b = math.ceil((time - a) * new.p)
    if b == new.p then
        return now + a + 1, 0
    end
    return now + a, b
end

-- The time in a bucket of this very limit, which nearly all are: that is quicker told than read in full.
local function own_time(value, limit, p)
    if string.sub(value, 1, #limit) == limit then
        local a, b = string.match(value, '^:(%d+):(%d+)$', #limit + 1)
        a, b = tonumber(a), tonumber(b)
        if a and a <= 2 * MOST and b < p then
            return a, b
        end
    end
end

-- A bucket as it is now, from full to empty, and whether that differs from what is kept.
local function read_bucket(key, limit, p, burst_a, burst_b)
    local value = read(key)
    if not value then
        return now, 0, false
    end
    local a, b = own_time(value, limit, p)
    local differs = not a
    if differs then
        local kept = parse(value)
        if not kept then
            problem = key .. ' holds no bucket of version ' .. VERSION
            return now, 0, false
        end
        if kept.a < now then
            kept.a, kept.b = now, 0
        end
        a, b = carry(kept, limit)
    elseif a < now then
        a, b = now, 0
    end
    local empty = now + burst_a
    if a > empty or (a == empty and b > burst_b) then
        return empty, burst_b, true
    end
    return a, b, differs
end

local time = redis.call('TIME')
now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if now > MOST then
    return redis.error_reply("CALLGATE the server's clock is beyond the year 2112")
end

local mode = ARGV[1]

if mode == 'prove' then
    redis.call('GET', KEYS[1])
    return redis.call('SET', KEYS[1], VERSION, 'PX', 1000)
end

if mode == 'pause' then
    local till = math.max(read_pause(KEYS[1]), now + tonumber(ARGV[2]))
    if problem then
        return redis.error_reply('CALLGATE ' .. problem)
    end
    write(KEYS[1], string.format('%s:%.0f', VERSION, till), till + tonumber(ARGV[3]))
    return redis.status_reply('OK')
end

local limits = {}

for i = 1, #KEYS / 2 do
    local at = 6 * i - 3
    local limit = ARGV[at]
    local p, burst_a, burst_b = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local price_a, price_b = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
    local kept_a, kept_b, differs = read_bucket(KEYS[2 * i - 1], limit, p, burst_a, burst_b)
    local pause = read_pause(KEYS[2 * i])
    local a, b = kept_a, kept_b
    -- Nothing is below a bucket that is empty when the pause ends.
    if pause + burst_a > a or (pause + burst_a == a and burst_b > b) then
        a, b = pause + burst_a, burst_b
    end
    limits[i] = {
        limit = limit, p = p, burst_a = burst_a, burst_b = burst_b, price_a = price_a, price_b = price_b,
        a = a, b = b, kept_a = kept_a, kept_b = kept_b, differs = differs, paused = math.max(pause - now, 0),
    }
end

if problem then
    return redis.error_reply('CALLGATE ' .. problem)
end

-- Whether all limits admit one more call, and what they would then be.
local function admit()
    local all = true
    for _, found in ipairs(limits) do
        local a, b = found.a + found.price_a, found.b + found.price_b
        if b >= found.p then
            a, b = a + 1, b - found.p
        end
        local wait = a - found.burst_a - now
        if b > found.burst_b then
            wait = wait + 1
        end
        found.next_a, found.next_b, found.wait = a, b, math.max(wait, 0)
        all = all and wait <= 0
    end
    return all
end

local takes = mode == 'take'
local admitted = 0
local count = tonumber(ARGV[2])
while admitted < count and admit() do
    admitted = admitted + 1
    for _, found in ipairs(takes and limits or {}) do
        found.a, found.b = found.next_a, found.next_b
    end
end

local answer = { admitted }
for i, found in ipairs(limits) do
    if takes and admitted > 0 then
        found.kept_a, found.kept_b, found.differs = found.a, found.b, true
    end
    if takes and found.differs then
        write(KEYS[2 * i - 1], string.format('%s:%.0f:%.0f', found.limit, found.kept_a, found.kept_b), found.kept_a)
    end
    answer[4 * i - 2] = found.wait
    answer[4 * i - 1] = found.a - now
    answer[4 * i] = found.b
    answer[4 * i + 1] = found.paused
end
return answer
