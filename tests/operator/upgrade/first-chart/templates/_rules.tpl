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
  resources: [serviceaccounts, services]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
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
{{- if .prometheusOperator }}
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .dashboards }}
- apiGroups: [""]
  resources: [configmaps]   # templates/dashboards.yaml narrows this to dashboards
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- end }}
{{- end -}}
