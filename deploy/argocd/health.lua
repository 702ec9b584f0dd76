-- Health of a TrainingSession or a BaseModel, for Argo CD, which considers every custom resource healthy by default.
local function condition(name)
  for _, found in ipairs((obj.status or {}).conditions or {}) do
    if found.type == name then return found end
  end
  return { status = "Unknown", message = "" }
end

local function report(status, found)
  return { status = status, message = found.message or "" }
end

if obj.metadata.deletionTimestamp ~= nil then
  return { status = "Progressing", message = "being deleted" }
end
if (obj.status or {}).observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "waiting for the operator to observe this generation" }
end
if condition("Stalled").status == "True" then return report("Degraded", condition("Stalled")) end
if condition("Suspended").status == "True" then return report("Suspended", condition("Suspended")) end
if condition("Ready").status == "True" then return report("Healthy", condition("Ready")) end
-- Finished sessions are healthy.
if obj.status.phase == "Finished" then return report("Healthy", condition("Ready")) end
return report("Progressing", condition("Ready"))
