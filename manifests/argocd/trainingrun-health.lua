-- Argo CD's health check of a TrainingRun: the phase, and why. It goes into the ConfigMap argocd-cm,
-- key resource.customizations.health.ling.primatrix.io_TrainingRun; see docs/install.md.
local health = {
  Complete = "Healthy",
  Running = "Healthy",
  Halted = "Degraded",
  Failed = "Degraded",
  Cancelled = "Degraded",
  Suspended = "Suspended",
}

local function condition(kind)
  for _, each in ipairs(obj.status.conditions or {}) do
    if each.type == kind then
      return each
    end
  end
  return nil
end

local hs = { status = "Progressing", message = "the operator has not seen it yet" }
if obj.status == nil or obj.status.phase == nil then
  return hs
end
if obj.status.observedGeneration ~= obj.metadata.generation then
  hs.message = "the operator has not seen the last change yet"
  return hs
end

local phase = obj.status.phase
hs.status = health[phase] or "Progressing"
hs.message = phase

-- A condition of the phase's own name says why; a run that cannot be made says it in Created.
local why = condition(phase)
if why ~= nil and why.status ~= "True" then
  why = nil
end
local created = condition("Created")
if created ~= nil and created.status == "False" then
  if created.reason == "InvalidConfig" or created.reason == "NameConflict"
      or created.reason == "CreateFailed" then
    hs.status = "Degraded"
  end
  why = why or created
end
if why ~= nil and why.message ~= nil and why.message ~= "" then
  hs.message = phase .. ": " .. (why.reason or "") .. ": " .. why.message
end

local training = obj.status.training
if phase == "Running" and training ~= nil and training.step ~= nil then
  hs.message = "step " .. training.step
  if training.targetSteps ~= nil then
    hs.message = hs.message .. " of " .. training.targetSteps
  end
end

-- A rule with action Alert stops nothing, and so does not degrade the application.
local healthy = condition("Healthy")
if phase == "Running" and healthy ~= nil and healthy.status == "False" then
  hs.message = hs.message .. "; " .. (healthy.reason or "") .. ": " .. (healthy.message or "")
end
return hs
