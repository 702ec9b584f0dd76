-- Health of a TrainingSession or a BaseModel, for Argo CD. Argo CD holds every custom resource for healthy unless told.
local function condition(name)
  for _, found in ipairs((obj.status or {}).conditions or {}) do
    if found.type == name then return found end
  end
  return { status = "Unknown", message = "" }
end

local function said(status, found)
  return { status = status, message = found.message or "" }
end

if obj.metadata.deletionTimestamp ~= nil then
  return { status = "Progressing", message = "is being deleted" }
end
if (obj.status or {}).observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "the operator has not looked at this specification yet" }
end
if condition("Stalled").status == "True" then return said("Degraded", condition("Stalled")) end
if condition("Suspended").status == "True" then return said("Suspended", condition("Suspended")) end
if condition("Ready").status == "True" then return said("Healthy", condition("Ready")) end
-- What is over is as it should be.
if obj.status.phase == "Finished" then return said("Healthy", condition("Ready")) end
return said("Progressing", condition("Ready"))
