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

{{/* "true" where the custom metrics API is served. */}}
{{- define "stoker.adapter" -}}
{{- if or (eq .Values.metricsAdapter.mode "On") (and (eq .Values.metricsAdapter.mode "Auto") (not .Values.watchNamespaces)) -}}true{{- end -}}
{{- end -}}

{{- define "stoker.adapterSecret" -}}
{{- .Values.metricsAdapter.tls.secretName | default (printf "%s-metrics-api-tls" (include "stoker.name" .)) -}}
{{- end -}}

{{/* What the operator may do where it watches. Each verb is used by observe.py, apply.py or mirror.py. */}}
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
  resources: [configmaps]   # dashboards, where the Prometheus operator is installed
  verbs: [get, list, watch, create, patch, delete]
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
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies, ingresses]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors, prometheusrules]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
{{- end -}}
