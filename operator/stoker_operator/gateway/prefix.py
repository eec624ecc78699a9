"""What Envoy reads of a request's body to send requests that begin alike to the same pod: a script of Envoy's own Lua.

The key is a hash of the messages up to the first one of the assistant, or of the first part of a prompt. All turns of a
conversation have the same key, and so have conversations with the same beginning. It decides nothing but which of a
model's pods is asked first, so a body that it does not understand costs a cache hit and no more.
Invariants: it looks at the first 64 KiB and hashes at most 2 KiB; a header of its name that a client sent is dropped.
Knows nothing of pods.
"""

HEADER = "x-stoker-prefix"
SCRIPT = r"""
local bit = require("bit")
local LOOKED, LONGEST, PROMPT = 65536, 2048, 256

local function string_end(text, at)
  local stop, back = at, at
  repeat
    stop = text:find('"', stop + 1, true)
    if not stop then return nil end
    back = stop - 1
    while text:byte(back) == 92 do back = back - 1 end
  until (stop - back) % 2 == 1
  return stop
end

-- Where the last message before the first one of the assistant ends, or all of the text.
local function messages_end(text, from)
  local depth, closed, at = 0, from, from
  while true do
    at = text:find('["{}%[%]]', at + 1)
    if not at then return #text end
    local char = text:sub(at, at)
    if char == '"' then
      if depth == 1 and text:find('^"role"%s*:%s*"assistant"', at) then return closed end
      at = string_end(text, at)
      if not at then return #text end
    elseif char == "{" or char == "[" then
      depth = depth + 1
    else
      depth = depth - 1
      if depth < 0 then return closed end
      if depth == 0 then closed = at end
    end
  end
end

local function beginning(text)
  local _, from = text:find('"messages"%s*:%s*%[')
  if from then return text:sub(from, math.min(messages_end(text, from), from + LONGEST)) end
  for _, name in ipairs({"prompt", "input"}) do
    local _, at = text:find('"' .. name .. '"%s*:%s*')
    if at then return text:sub(at + 1, at + PROMPT) end
  end
end

local function hashed(text)
  local sum = 2166136261
  for i = 1, #text do
    sum = bit.tobit(bit.bxor(sum, text:byte(i)))
    sum = bit.tobit(bit.lshift(sum, 24) + bit.lshift(sum, 8) + sum * 147)
  end
  return bit.tohex(sum)
end

function envoy_on_request(request)
  request:headers():remove("HEADER")
  local body = request:body()
  if body == nil then return end
  local length = body:length()
  if length == 0 then return end
  local found = beginning(body:getBytes(0, math.min(length, LOOKED)))
  if found then request:headers():add("HEADER", hashed(found)) end
end
""".replace("HEADER", HEADER)
