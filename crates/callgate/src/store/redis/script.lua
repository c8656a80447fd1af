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
-- KEYS: for each limit its bucket and its pause; for 'wait' then for each limit its line.
--   A bucket holds 'limit:a:b' and expires when it is full: none is a full one. 'limit' is what it was
--   written under, 'version:p:whole:part:burst': a token takes the time (whole, part), and the burst
--   is in tokens.
--   A pause holds 'version:end'. Until then nobody draws, and then the limit's buckets are empty.
--   A line is a sorted set of the processes that wait for the bucket, with two members for each. The score of
--   'process' is positive, and its place: its predecessor's and its own price. That of '-process' is negative: when it
--   is to come next. It expires when all should have come.
-- ARGV: 'take', 'wait', 'peek', 'pause' or 'prove'; and then
--   take, wait, peek: how many such calls there are (wait, peek: 1), and for each limit 'limit', p, the time of its
--   burst, and a call's price, which is a time too.
--   wait: after that the process, and for each limit how much longer the call may wait.
--   pause: how long, and how long its end is to be remembered.
-- Answers:
--   take, wait, peek: how many of the calls all limits admit. And for each limit: in how many microseconds it
--   admits the next of them, 0 where none is left (wait: for the limit that refuses the longest, when to ask again, or
--   when its turn would come, if that is too late); the time in which its bucket is full (once charged, for take and
--   wait); and how many microseconds its pause goes on.
--   wait: after that, how many other processes are in line.
--   pause, prove: 'OK'.
--   An error that begins with CALLGATE is about the key that it names, or about the clock.
--
-- A refused call writes nothing, but for a bucket that was carried, or that is beyond empty because the
-- clock was set back: that one is kept as it was read. And if it waits, its process has a place in the line of the
-- limit that refuses it the longest, until one of its calls is admitted. A peek never writes.
--
-- A line reserves nothing, and no decision depends on it: it tells when to ask, so that not all ask for each token.
-- The first one does, and after it the second: the first may be gone. All others come when few are left ahead.

local VERSION = '1'
local MOST = 2 ^ 52
-- Makes up for more roundings of doubles than there are, each by up to 2^-53 of a number.
local UP = 1 + 2 ^ -49

-- In a line, the second one comes so much after the first; or less, where tokens come fast.
local AFTER = 5000
-- Who is so late is likely to have left, and does not count any more; and is taken out when this is over.
local LATE = 50000
local GONE = 1000000
-- Of so many who are ahead, one may leave while nobody looks, and no token is lost.
local SPARE = 8

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

local waits = mode == 'wait'
local limits = {}

for i = 1, #KEYS / (waits and 3 or 2) do
    local at = 6 * i - 3
    local limit = ARGV[at]
    local p, burst_a, burst_b = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local price_a, price_b = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
    local kept_a, kept_b, differs = read_bucket(KEYS[2 * i - 1], limit, p, burst_a, burst_b)
    local pause = read_pause(KEYS[2 * i])
    local a, b = kept_a, kept_b
    -- Nothing is below a bucket that is empty when the pause ends.
    if pause > 0 and (pause + burst_a > a or (pause + burst_a == a and burst_b > b)) then
        a, b = pause + burst_a, burst_b
    end
    limits[i] = {
        limit = limit, p = p, burst_a = burst_a, burst_b = burst_b, price_a = price_a, price_b = price_b,
        a = a, b = b, kept_a = kept_a, kept_b = kept_b, differs = differs, paused = math.max(pause - now, 0),
    }
end

local process
if waits then
    process = ARGV[6 * #limits + 3]
    for i, found in ipairs(limits) do
        found.line, found.left = KEYS[2 * #limits + i], tonumber(ARGV[6 * #limits + 3 + i])
        found.place = redis.pcall('ZSCORE', found.line, process)
        if type(found.place) == 'table' then
            problem = found.line .. ' cannot be read: ' .. found.place.err
        end
    end
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

local takes = waits or mode == 'take'
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
if not waits then
    return answer
end

-- A score, whoever wrote it, as a whole number that is in range.
local function score(text)
    return math.max(-2 * MOST, math.min(math.floor(tonumber(text) or 0), 2 * MOST))
end

-- Takes those out of a line who should have come long ago; some at a time.
local function forget_the_gone(line)
    local since = string.format('(%.0f', GONE - now)
    local gone = redis.call('ZRANGE', line, since, '(0', 'BYSCORE', 'LIMIT', 0, 16)
    for _, due in ipairs(gone) do
        if due ~= '-' .. process then
            redis.call('ZREM', line, due, string.sub(due, 2))
        end
    end
end

-- Gives the process a place in a limit's line, if it can be served in time from there. Tells when it is to ask
-- again, and how many others there are.
local function line_up(found)
    local line = found.line
    local place = found.place and math.max(score(found.place), 1)
    local price = found.price_a + (found.price_b > 0 and 1 or 0)
    forget_the_gone(line)
    local first = redis.call('ZRANGE', line, 0, 'inf', 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2]
    local ahead = redis.call('ZCOUNT', line, 0, place and string.format('(%.0f', place) or 'inf')
    if not place then
        local last = redis.call('ZRANGE', line, 0, 0, 'REV', 'WITHSCORES')[2]
        place = first and math.min(score(last) + price, 2 * MOST) or now
    end
    ahead = ahead - redis.call('ZCOUNT', line, string.format('(%.0f', LATE - now), '(0')
    local wait = found.wait
    if ahead > 0 then
        -- The time of those ahead, but the first. Some may ask for less than this call, and some may have left.
        local others = math.max(math.min((ahead - 1) * price, place - price - score(first), MOST), 0)
        if not found.place and wait + others + price > found.left then
            return wait + others + price, ahead
        end
        local spare = math.floor(others / price / SPARE) * price
        wait = wait + others - spare + math.min(math.floor(price / 16), AFTER)
    elseif not found.place and wait > found.left then
        return wait, 0
    end
    local due = string.format('%.0f', -now - math.min(wait, found.left))
    redis.call('ZADD', line, string.format('%.0f', place), process, due, '-' .. process)
    local last_due = score(redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2])
    redis.call('PEXPIREAT', line, string.format('%.0f', math.ceil((GONE - last_due) / 1000)))
    return wait, redis.call('ZCOUNT', line, 0, 'inf') - 1
end

local others = 0
if admitted > 0 then
    for _, found in ipairs(limits) do
        if found.place then
            redis.call('ZREM', found.line, process, '-' .. process)
        end
        others = others + redis.call('ZCOUNT', found.line, 0, 'inf')
    end
else
    local longest = 1
    for i, found in ipairs(limits) do
        longest = found.wait > limits[longest].wait and i or longest
    end
    answer[4 * longest - 2], others = line_up(limits[longest])
end
answer[4 * #limits + 2] = others
return answer
