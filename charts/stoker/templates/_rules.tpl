{{/* What the operator may do where it watches. Each verb is used by what observes or by what applies. */}}
{{- define "stoker.rules" -}}
- apiGroups: [stoker.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [stoker.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
- apiGroups: [stoker.dev]
  resources: [inferenceservices/finalizers]   # to set blockOwnerDeletion where the API server enforces it
  verbs: [update]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services]   # the one of a canary that is over is deleted, and so is its Deployment
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]   # a kubelet's events tell of a key Secret that is gone; Secrets are not read
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
{{- if .Values.activator.enabled }}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]   # lead to the activator while a service sleeps
  verbs: [get, list, watch, create, patch, delete]
{{- if include "stoker.openshift" . }}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices/restricted]   # where the API server guards the addresses of pods
  verbs: [create]
{{- end }}
{{- end }}
{{- with .Values.features }}
{{- if .horizontalPodAutoscaler }}
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .keda }}
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .ingress }}
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .gatewayApi }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .inferencePool }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .prometheusOperator }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .leaderWorkerSet }}
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]   # templates/secrets.yaml narrows this to those that groups share; none is ever read
  verbs: [create]
{{- end }}
{{- if or .dashboards .adapters }}
- apiGroups: [""]
  resources: [configmaps]   # templates/config-maps.yaml narrows this to dashboards and lists of adapters
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end }}
{{- end -}}

{{/* What the activator may do: learn who sleeps, and ask that it wakes. */}}
{{- define "stoker.activatorRules" -}}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
- apiGroups: [stoker.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
{{- end -}}

{{/* What the gateway may do: learn which services there are, and where their pods are. */}}
{{- define "stoker.gatewayRules" -}}
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end -}}
