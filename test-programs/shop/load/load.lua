-- What wrk asks the shop for: mostly prices, some searches and orders.

local count = 0

request = function()
  count = count + 1
  if count % 20 == 0 then
    return wrk.format("GET", "/search/lamp")
  elseif count % 10 == 5 then
    return wrk.format("GET", "/order/" .. count)
  else
    return wrk.format("GET", "/price/" .. count % 500)
  end
end
