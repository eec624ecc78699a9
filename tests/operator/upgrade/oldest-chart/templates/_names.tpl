{{- define "stoker.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "stoker.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "stoker.name" .) -}}
{{- end -}}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: stoker-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: stoker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* What the operator may do where it watches. Each verb is used by observe.py, apply.py or the watches. */}}
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
  verbs: [list]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
{{- end -}}
